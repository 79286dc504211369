"""Private APIs of other libraries, one file for each library."""
