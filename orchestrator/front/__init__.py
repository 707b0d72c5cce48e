"""What clients and operators speak to: servicers, and who may call them."""
