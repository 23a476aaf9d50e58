"""Step marks: mark -> ring -> flusher -> file -> report, and the switch that turns them on and off live.

The files are byte-compatible with those of TaskD's profiling worker (docs/facts/taskd.md §6).
"""
