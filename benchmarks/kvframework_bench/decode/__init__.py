"""Decoding beside loads: what a request that is answered notices of another one whose long prefix is loaded."""
