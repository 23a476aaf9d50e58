"""Finds problems of a machine before a job does: one small function per check, each with its fix.

Nothing here imports a framework or a package of MindCluster's: versions are read from their metadata, places from
the import system's finders.
"""
