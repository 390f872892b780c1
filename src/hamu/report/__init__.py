"""Show runs: pictures saved as files, and the report, one HTML file."""
