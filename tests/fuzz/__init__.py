"""Bytes that nobody meant, given to what reads bytes of others; run with atheris, in processes of their own."""
