"""Tables as typed values, one module for each kind of row, within one transaction."""
