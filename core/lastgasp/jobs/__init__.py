"""Workers register with the job's manager; operators query it and switch the marks."""
