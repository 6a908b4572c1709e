"""The protocol as a state machine that can be explored, and a checker of histories. Neither imports the product."""
