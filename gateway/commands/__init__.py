"""The families of the `strop` command, one module each."""
