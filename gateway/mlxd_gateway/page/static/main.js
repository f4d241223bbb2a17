// Where the page begins.

import { App } from "./parts/app.js";
import { html, render } from "./lib/ui.js";

render(html`<${App} />`, document.getElementById("root"));
