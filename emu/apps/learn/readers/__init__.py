"""Result files of the tools that drive servers, one module a tool."""
