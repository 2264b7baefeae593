"""The enrolment authority: a process separate from the coordinator, which attests devices and signs their credentials.

Spec: docs/spec/wire.md §9.
"""
