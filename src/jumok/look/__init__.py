"""Inspection of attention: capture, statistics, viewer and figures."""
