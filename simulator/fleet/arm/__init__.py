"""64-bit ARM devices on another machine: a Debian folder tree, and qemu-user to run its Python (docs/emulators.md)."""
