"""Tests, of which a package is a folder whose tests share what ends with the last of them."""
