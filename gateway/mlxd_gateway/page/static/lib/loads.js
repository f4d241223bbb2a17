// The loads and unloads that this page has asked for, with what they say until they are over.

import { ask, follow } from "./api.js";
import { useCallback, useState } from "./ui.js";

/**
 * @typedef {object} Loads
 * @property {Record<string, {model: any, error: string, busy: boolean}>} byName
 *   the last word of each: `model` as a load's last step has it, null before and after
 * @property {(options: {model: string}) => Promise<boolean>} load whether it is ready then
 * @property {(name: string, options: object) => Promise<void>} unload
 * @property {string} news the latest end, for a screen reader
 */

/** @returns {Loads} */
export function useLoads() {
  const [byName, setByName] = useState({});
  const [news, setNews] = useState("");

  const say = useCallback((name, change) => {
    const fresh = { model: null, error: "", busy: false };
    setByName((before) => ({ ...before, [name]: { ...fresh, ...change } }));
  }, []);

  const load = useCallback(async (options) => {
    const name = options.model;
    say(name, { busy: true });
    try {
      for await (const event of follow("api/load", { body: options })) {
        if (event.name === "model") {
          say(name, { model: event.data, busy: true });
        }
      }
      say(name, {});
      setNews(`${name} is loaded.`);
      return true;
    } catch (error) {
      say(name, { error: error.message });
      setNews(`${name} was not loaded. ${error.message}`);
      return false;
    }
  }, []);

  const unload = useCallback(async (name, options) => {
    say(name, { busy: true });
    try {
      await ask("api/unload", { body: { model: name, ...options } });
      say(name, {});
      setNews(`${name} is unloaded.`);
    } catch (error) {
      say(name, { error: error.message });
      setNews(`${name} was not unloaded. ${error.message}`);
    }
  }, []);

  return { byName, load, unload, news };
}

/**
 * @param {Loads} loads
 * @param {any[]} models
 * @returns {[string, {error: string}][]} what failed under a name that is no model's: a folder's
 *   path, an alias
 */
export function unlisted(loads, models) {
  return Object.entries(loads.byName).filter(
    ([name, { error }]) => error && !models.some((model) => model.name === name),
  );
}
