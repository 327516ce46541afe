"""Files and folders: complete or absent, and read back however damaged they are."""
