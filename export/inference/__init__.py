"""Inference models with their weights inside, for apps without Muster: plain ONNX, ExecuTorch and torch."""
