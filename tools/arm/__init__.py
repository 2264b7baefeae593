"""The sysroot of emulated ARM devices, made from Debian and PyPI (docs/emulators.md), and Muster's own wheel."""
