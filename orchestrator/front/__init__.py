"""What clients and operators speak to: servicers, who may call, who must wait."""
