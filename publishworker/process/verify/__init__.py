"""`publishworker verify`: proves on a scratch database what the emulator cannot show."""
