"""Questions to devices, from SQL or by name, as what the exporter makes plans of."""
