"""Forecasts of step times."""
