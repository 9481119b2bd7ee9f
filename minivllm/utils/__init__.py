"""Helpers that belong to no room: process start, titles and logs, NUMA and OpenMP settings, the rendezvous."""
