"""Plug-ins of pytest that run the tests of engines over our stores, and the tests that fail and are to."""
