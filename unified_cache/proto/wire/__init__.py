"""The contract of the service as both ends use it: calls, labels and pages as messages."""
