"""Tests of real."""
