"""What to buy and how to configure it for a trace: `kvframework plan`."""
