"""The enrolment authority: a process apart from the coordinator that decides who is a device, and says so with its key.

Spec: docs/spec/wire.md §9.
"""
