"""Worker processes that run code of users: how they are started, limited, called and killed."""
