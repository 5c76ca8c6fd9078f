"""The interactive viewer: data, server, saved files and notebook widget."""
