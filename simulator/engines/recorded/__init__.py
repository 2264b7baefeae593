"""A compiler of training steps: a model's recorded operators become one program for many clients. See README.md."""
