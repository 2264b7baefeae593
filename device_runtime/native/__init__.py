"""C++ between this package and ExecuTorch, and its build."""
