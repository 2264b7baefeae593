"""The exporter: a torch model, its loss and an algorithm become an on-device plan of training graphs."""
