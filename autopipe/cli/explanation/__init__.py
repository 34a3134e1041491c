"""How plans, and what else there was, are explained on the screen."""
