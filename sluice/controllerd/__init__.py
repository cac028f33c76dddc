"""The controllers' daemon and its duties."""
