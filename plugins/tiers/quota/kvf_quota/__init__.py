"""Quotas of tenants in L2, promises of tiers to keep values, and the use of each tenant by day.

A tier imports what it needs where this package is installed; without it no tier promises anything.
"""
