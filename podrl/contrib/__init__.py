"""The engine under other projects' interfaces; podrl itself does not use these modules."""
