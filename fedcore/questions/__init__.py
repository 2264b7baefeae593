"""Questions to devices: what each makes of its rows, and the table that is read from their sum."""
