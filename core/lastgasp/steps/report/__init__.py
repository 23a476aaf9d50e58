"""Finds slow ranks and the reasons from a job's profiling files, TaskD's or lastgasp's own.

places -> rows -> ranges -> fold (one table of steps per rank) -> judge -> tables, page, trace, JSON.
"""
