"""Private APIs of other libraries, one file each, with the versions they were tested with."""
