"""The C++ between this package and ExecuTorch, and what builds it."""
