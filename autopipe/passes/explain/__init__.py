"""Why a plan takes as long as it does, and what other choices would have cost."""
