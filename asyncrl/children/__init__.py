"""Processes that run the code of users: started, limited and killed with everything that they start."""
