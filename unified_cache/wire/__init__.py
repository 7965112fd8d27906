"""What both ends of the service's contract need: names of calls, pages as messages, and pages as a run of bytes."""
