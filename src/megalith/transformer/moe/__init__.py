"""Mixture of experts: route, dispatch, compute, combine."""
