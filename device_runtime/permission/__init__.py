"""The device owner's permission: policy, its checks, and offers."""
