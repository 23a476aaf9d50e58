"""What is wrong with a machine, before a job finds out: one small function per trap, each with its fix.

Nothing here imports a framework or a package of MindCluster's: versions are read from their metadata, places from
the import system's finders.
"""
