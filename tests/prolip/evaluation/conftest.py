"""Tests below this folder import its helper modules (miniatures, ...): pytest puts a conftest's folder on the path."""
