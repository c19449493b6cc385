"""Stages that several devices share: parts of variables, layers that compute on parts, what they exchange."""
