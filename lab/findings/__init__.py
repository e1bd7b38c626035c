"""One module a finding: what it measures, and the figure. docs/findings/ has their pages."""
