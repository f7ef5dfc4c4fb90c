"""The kinds of work a step may hold, one file each; `registry` lists them."""
