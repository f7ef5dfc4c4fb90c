"""The doctor: checks of one machine, each a process of its own with a time limit, and a report to send."""
