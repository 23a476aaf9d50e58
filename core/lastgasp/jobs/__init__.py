"""Workers register with whoever manages the job, and operators ask it: who runs where, and switch the marks."""
