"""From the profiling files of a job, TaskD's or lastgasp's own, to who is slow and why.

places -> rows -> ranges -> fold (one table of steps per rank) -> judge -> tables, page, trace, JSON.
"""
